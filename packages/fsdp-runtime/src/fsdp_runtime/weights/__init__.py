"""Weights in and out: files into shards, full tensors out of them, and where shards rest meanwhile.

boxes      what a rank holds of a tensor, and which bytes of a file that is     knows: nothing
files      safetensors files and their headers
rules      names and shapes that differ between a file and a model
loading    `load_safetensors`
"""
