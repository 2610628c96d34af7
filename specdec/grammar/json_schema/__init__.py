"""JSON schemas as real generators write them, rewritten into the keywords that llguidance takes.

The rewritten schema is valid for the same values, with three exceptions: bounds that no 64-bit float equals are
narrowed, a property that tells the parts of a `oneOf` apart is always written, and the item that fits `contains` is
among the first ones of its array. A keyword without an equivalent is refused with its place in the schema, a JSON
pointer. Annotations are dropped. So are keywords that JSON Schema does not have and formats that llguidance does not
know (annotations too: JSON Schema 2020-12, 7.2.1).

`rewriting` has the entry points and goes through a schema's keywords. `numbers`, `strings`, `arrays`, `objects`,
`property_names` and `combinations` have the rules by keyword, and `negation` has each keyword's opposite.
"""
