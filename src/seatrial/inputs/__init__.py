"""Inputs beyond the declared ones: what each input means, other values for it, other sizes."""
