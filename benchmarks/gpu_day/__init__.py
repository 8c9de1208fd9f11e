"""All that a day with a GPU should bring home, in parts that stop in time and go on later.

`python3 -m benchmarks.gpu_day OUT_FOLDER` needs Python, cuda-bindings and this repository; torch
for the decode loop, pytest for the tests, root for huge pages. What is missing is said in the row
that needs it. Rows go to OUT_FOLDER/rows.jsonl as they come.
"""
