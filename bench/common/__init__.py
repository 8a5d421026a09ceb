"""What all questions share: the state of the machine, files and tables, processes."""
