"""Shampoo and SOAP: preconditioners of whole blocks. Knows core only."""
