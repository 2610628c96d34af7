// The check of a made-up client: one use works, the others do not.
import { called, joined, sameText, server, use } from "./uses.mjs";

use("right", async () => sameText(` ${server.answer}\n`, server.answer));
use("wrong", async () => sameText("something else", server.answer));
use("in one piece", async () => joined([server.answer], server.answer));
use("no city", async () => called("get_weather", { city: "London" }));
