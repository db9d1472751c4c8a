"""What a run will need, before there is a machine to run it on."""
