"""python -m seatrial."""

from seatrial.cli import main

main()
