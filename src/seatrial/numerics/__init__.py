"""The fp64 oracle and what an honest kernel's error may look like.

`oracle.Oracle` says what the right answer is, `envelope.Envelope` how far an honest kernel may be from
it. No tolerance is written down anywhere: the scale is measured on the reference itself.
"""
