"""How long engines take to have their host memory: their own code, cold and prepared."""
