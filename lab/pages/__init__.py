"""What writes tables, numbers and pictures into the pages of docs/ (`make pages`)."""

from lab import ROOT

DOCS = ROOT / "docs"
