// The AI SDK with its provider for Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";

import { chats } from "./ai_sdk.mjs";
import { server } from "./uses.mjs";

chats(createAnthropic({ baseURL: server.base, apiKey: server.key })(server.model));
