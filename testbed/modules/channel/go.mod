module hostprep.dev/testbed/channel

go 1.26
