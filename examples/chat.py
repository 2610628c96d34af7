"""Ask in chat form. The model's own chat template turns the messages into a prompt."""

import sys

from specdec import Client
from specdec.client import InvalidRequest, Message


def main(address: str = "127.0.0.1:50050") -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "What is speculative decoding?"},
    ]
    with Client(address) as client:
        try:
            completion = client.complete(messages=messages, max_tokens=48).completions[0]
        except InvalidRequest as error:  # a base model may have no template
            print(error.violations)
            return
        print(completion.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
