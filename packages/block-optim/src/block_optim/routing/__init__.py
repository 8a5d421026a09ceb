"""Which algorithm for which parameter, and several as one optimizer. Knows all other rooms."""
