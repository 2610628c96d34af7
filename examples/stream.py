"""Stream a completion, and print the sources of its tokens."""

import sys

from specdec import Client


def main(address: str = "127.0.0.1:50050") -> None:
    with Client(address) as client:
        with client.generate("def main(", max_tokens=48, temperature=0.7, seed=1) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        assert chunk.finish is not None  # of the last chunk
        speculation = chunk.finish.speculation
        print(f"\n{speculation.mean_tokens_per_step:.2f} tokens a step, from {speculation.sources}")


if __name__ == "__main__":
    main(*sys.argv[1:])
