"""Systems under test: specdec and its variants, and other systems that serve language models.

Some of these modules run as programs under another interpreter, so they do not import specdec.
"""
