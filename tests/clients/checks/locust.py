"""Locust: a load of chats for five seconds."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

from tests.clients.checks.uses import WrongAnswerError, said, server, use

SERVER = server()
FOLDER = Path(os.environ["HOME"])
BODY = {"model": SERVER.model, "messages": [{"role": "user", "content": "Read a file."}], "max_tokens": 8}
(FOLDER / "chats.py").write_text(f"""
import json
from locust import HttpUser, task

class Caller(HttpUser):
    @task
    def chat(self):
        headers = {{"authorization": "Bearer {SERVER.key}"}}
        self.client.post("/v1/chat/completions", json=json.loads({json.dumps(json.dumps(BODY))}), headers=headers)
""")


@use("a load of chats")
def load() -> None:
    options = ("--headless", "--users", "2", "--spawn-rate", "2", "--run-time", "5s", "--host", SERVER.url)
    said("locust", "-f", FOLDER / "chats.py", *options, "--csv", FOLDER / "load")
    with (FOLDER / "load_stats.csv").open() as file:
        total = [row for row in csv.DictReader(file) if row["Name"] == "Aggregated"][-1]
    if int(total["Failure Count"]) or int(total["Request Count"]) < 5:
        raise WrongAnswerError(f"{total['Request Count']} requests, {total['Failure Count']} failures")
