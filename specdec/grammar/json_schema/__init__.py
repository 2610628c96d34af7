"""JSON schemas as real generators write them, rewritten into the keywords that llguidance supports.

The rewritten schema is valid for the same values, with four exceptions. A bound that no 64-bit float can represent is
narrowed. A property that alone distinguishes the parts of a `oneOf` becomes required. The item that matches `contains`
is among the first items of its array. If the names outside `patternProperties` have no expression, or too large a one,
they are not written.

A keyword without an equivalent is refused with its place in the schema, a JSON pointer, or left to a check of the
finished text (`text_check`). Annotations are dropped, as are keywords that JSON Schema does not define, and formats
that neither llguidance nor `strings` knows (they are annotations, too: JSON Schema 2020-12, 7.2.1).

`rewriting` has the entry points and iterates over a schema's keywords. `numbers`, `strings`, `arrays`, `objects`,
`property_names` and `combinations` have the rules for the keywords, `negation` has each keyword's opposite, and
`one_of` compares the parts of a `oneOf`. `spelled_names` runs last and excludes second spellings of property names.
"""
