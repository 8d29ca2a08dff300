"""The command line: `k3rewrite compile | explain | passes | targets | check`."""

from k3rewrite.cli.app import main

__all__ = ["main"]
