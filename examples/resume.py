"""Resume an interrupted text. With its tokens, its seed and the model's revision it continues with the same tokens."""

import sys

from specdec import Client

PROMPT, SEED = "def main(", 7


def main(address: str = "127.0.0.1:50050") -> None:
    with Client(address) as client:
        whole = client.complete(PROMPT, max_tokens=40, temperature=0.8, seed=SEED).completions[0]

        with client.generate(PROMPT, max_tokens=40, temperature=0.8, seed=SEED) as stream:
            chunk = next(stream)
        # As if this process had died here. A chunk holds however many tokens were ready: keep at most ten here.
        tokens, revision = chunk.tokens[:10], chunk.model_fingerprint

        rest = client.complete(
            PROMPT,
            max_tokens=40,
            temperature=0.8,
            seed=SEED,
            generated_tokens=tokens,
            model_fingerprint=revision,
        ).completions[0]
        assert tokens + rest.tokens == whole.tokens
        print(whole.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
