"""Records of runs and the machine that they were measured on."""
