"""Tokens defined outside tokenizer.json, added by transformers' rules.

transformers' `TokenizersBackend` adds the tokens in `added_tokens_decoder` of tokenizer_config.json, or those of
added_tokens.json if that field is missing. Then it adds the special tokens that are still missing: the named ones
(`eos_token` and the like), then the unnamed ones in `extra_special_tokens`. A token that is already in tokenizer.json
gets the flags in tokenizer_config.json, including `special`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.engine.model_file import Fields, ModelDirectoryError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that any tokenizer may have, in the order they are added."""

MAX_ADDED_TOKENS = 100_000
"""Limit on each list of tokens outside tokenizer.json; published models have a few thousand at most."""

MAX_TOKEN_ID = (1 << 32) - 1
"""Largest permitted token id in tokenizer.json; ids there may exceed the model's vocabulary."""


@dataclass(frozen=True)
class AddedToken:
    """A token that is always recognised in a text, with the tokenizers library's flags."""

    content: str
    special: bool = False
    normalized: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False

    @classmethod
    def of(cls, entry: Fields, *, special: bool | None = None) -> AddedToken:
        """Read an entry of a file; `special` overrides the entry's own flag."""
        if special is None:
            special = entry.flag("special", default=False)
        normalized = entry.flag("normalized", default=not special)
        others = {name: entry.flag(name) for name in ("single_word", "lstrip", "rstrip") if entry.has(name)}
        return cls(entry.text("content"), special, normalized, **others)

    @classmethod
    def named(cls, fields: Fields, name: str, *, special: bool | None = None) -> AddedToken:
        """Read a special token, given as its text or as an entry."""
        if isinstance(fields.content[name], dict):
            return cls.of(fields.fields(name), special=special)
        return cls(fields.text(name), special=True, normalized=False)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files that define a model's tokens; a missing file has no fields."""

    tokenizer: Fields  # tokenizer.json
    settings: Fields  # tokenizer_config.json
    special: Fields  # special_tokens_map.json
    added: Fields  # added_tokens.json

    @property
    def end_token(self) -> str | None:
        """The text of the tokenizer's own end token; None if no file names one."""
        found = self._named().get("eos_token")
        return None if found is None else found.content

    def to_add(self) -> list[AddedToken]:
        """Return, in order, the tokens that tokenizer.json lacks or has with other flags. Raises ModelDirectoryError,
        naming file and field, if a field is invalid."""
        known = {entry.integer("id", 0, MAX_TOKEN_ID): AddedToken.of(entry) for entry in self._known()}
        unchanged = set(known.values())
        adding = [token for token in self._by_id(set(known)) if token not in unchanged]
        named = self._named().values()
        texts = {token.content for token in (*known.values(), *adding)}
        for token in (*named, *self._unnamed()):
            if token.content not in texts:
                adding.append(token)
                texts.add(token.content)
        names = {token.content for token in named}
        return [replace(token, special=token.special or token.content in names) for token in adding]

    def ids(self, pieces: dict[str, int]) -> dict[str, int]:
        """Return the ids of all tokens; `pieces` are the model's tokens in tokenizer.json. By the tokenizers library's
        rule, a new token from another file gets the next free id, whatever id the file gives."""
        added = {entry.text("content"): entry.integer("id", 0, MAX_TOKEN_ID) for entry in self._known()}
        found, highest = pieces | added, max(added.values(), default=-1)
        for token in self.to_add():
            number = found.setdefault(token.content, max(len(pieces), highest + 1))
            highest = max(highest, number)
        return found

    @property
    def _is_modern(self) -> bool:
        """True if tokenizer_config.json has the added tokens; then special_tokens_map.json and added_tokens.json are
        ignored."""
        return "added_tokens_decoder" in self.settings.content

    def _known(self) -> list[Fields]:
        return self.tokenizer.objects("added_tokens") if self.tokenizer.has("added_tokens") else []

    def _by_id(self, known: set[int]) -> list[AddedToken]:
        """Return the tokens that another file lists with ids, in order of id. Ids in added_tokens.json that
        tokenizer.json has too (`known`) are skipped."""
        if self._is_modern:
            entries = self.settings.fields("added_tokens_decoder")
            _check_count(f"{entries.file}: added_tokens_decoder", len(entries.content))
            by_id = {_id(entries, name): AddedToken.of(entries.fields(name)) for name in entries.content}
        else:
            _check_count(f"{self.added.file}:", len(self.added.content))
            special = {token.content for name, token in self._named().items() if name in NAMED}
            special |= {token.content for token in self._unnamed()}
            by_id = {
                self.added.integer(text, 0, MAX_TOKEN_ID): AddedToken(text, text in special, text not in special)
                for text in self.added.content
            }
            by_id = {number: token for number, token in by_id.items() if number not in known}
        return [token for _, token in sorted(by_id.items(), key=lambda entry: entry[0])]

    def _named(self) -> dict[str, AddedToken]:
        """Return special tokens by name: the standard names first, then a model's own."""
        found: dict[str, AddedToken] = {}
        for source in self._sources():
            special = True if source is self.special else None
            for name, value in source.content.items():
                if value is not None and (name in NAMED or (name.endswith("_token") and isinstance(value, str))):
                    found[name] = AddedToken.named(source, name, special=special)
            if isinstance(source.content.get("extra_special_tokens"), dict):
                entries = source.fields("extra_special_tokens")
                found |= {name: AddedToken.named(entries, name, special=special) for name in entries.content}
        usual = {name: found[name] for name in NAMED if name in found}
        return usual | found

    def _unnamed(self) -> list[AddedToken]:
        """Return special tokens without a name."""
        found: dict[str, AddedToken] = {}
        for source in self._sources():
            for name in ("extra_special_tokens", "additional_special_tokens"):
                value = source.content.get(name)
                if not isinstance(value, list) or not value:
                    continue
                _check_count(f"{source.file}: {name}", len(value))
                entries = Fields(source.file, {f"{name}[{place}]": entry for place, entry in enumerate(value)})
                tokens = [AddedToken.named(entries, place) for place in entries.content]
                found |= {token.content: token for token in tokens}
                break
        return list(found.values())

    def _sources(self) -> list[Fields]:
        return [self.settings] if self._is_modern else [self.settings, self.special]


def _id(entries: Fields, name: str) -> int:
    if not (name.isascii() and name.isdigit() and int(name) <= MAX_TOKEN_ID):
        raise entries.refusal(name, f"keyed by an integer from 0 to {MAX_TOKEN_ID}")
    return int(name)


def _check_count(what: str, count: int) -> None:
    if count > MAX_ADDED_TOKENS:
        raise ModelDirectoryError(f"{what} has {count} entries, must have at most {MAX_ADDED_TOKENS}")
