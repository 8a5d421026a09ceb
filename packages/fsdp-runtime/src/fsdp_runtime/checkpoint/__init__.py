"""Weights in and out: files into shards, full tensors out of them, and where shards rest meanwhile.

boxes, files, rules     tensors in files, and how names and shapes differ          know: nothing of models
fp8_files               codes in files, and their scales                           knows: files
targets, entries        what a model holds, for loading and for gathering          know: units
loading, full_state     into shards                                                know: files, targets
runs, changes, export   out of shards, in bounded memory, or only what changed     know: entries
full_params             whole parameters in the modules for a while                knows: runs
offload, snapshot       shards in CPU memory, copies of shards                     know: units
offloaded_optimizer     states in CPU memory, updates on the device                knows: offload
"""
