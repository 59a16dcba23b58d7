"""`python -m pkt` is the command `pkt`."""

from pkt.cli import app

if __name__ == "__main__":
    app()
