"""Systems under test: specdec and its variants, and other systems that serve language models.

Some of these modules run as programs under an interpreter of their own, so none of those imports specdec.
"""
