"""Every model class of the installed transformers, in small, by fa4 and by "eager"."""
