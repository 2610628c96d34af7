// Errors of calls, with what a service tells about them.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protobuf from "protobufjs";

const details = protobuf.loadSync(fileURLToPath(new URL("rpc_details.proto", import.meta.url)));

/** Reasons of a server that will not serve a text soon, where another one may. */
const SETTLED = ["DRAFT_REQUIRED", "MODEL_CHANGED", "PROMPT_CHANGED", "VERIFIER_LOST"];

/** Statuses of a connection that broke, where no server has given a reason, nor a proxy refused the call by HTTP. */
const BROKEN = ["CANCELLED", "INTERNAL", "UNKNOWN"];
const REFUSED = /HTTP status code:? 4\d\d/;

/** A call failed. */
export class SpecdecError extends Error {
  /** @param {grpc.ServiceError} error as gRPC raised it */
  constructor(error) {
    const told = detailsOf(error);
    super(error.details || grpc.status[error.code]);
    this.name = "SpecdecError";
    /** The status's name, such as "INVALID_ARGUMENT". */
    this.code = grpc.status[error.code];
    /** The server's name for what happened, such as "OVERLOADED"; empty if it gave none. */
    this.reason = told.ErrorInfo?.reason ?? "";
    /** {field, description} of each field that the server refused. */
    this.violations = told.BadRequest?.fieldViolations ?? [];
    /** Seconds after which the server suggests to try again, if it does. */
    this.retryAfter = told.RetryInfo ? secondsOf(told.RetryInfo.retryDelay) : undefined;
  }

  /**
   * Whether the server, and not the request, is to blame: another one may well answer. What no server has given a
   * reason for is a connection that broke.
   */
  get isLoss() {
    if (SETTLED.includes(this.reason)) return true;
    if (this.code === "UNAVAILABLE") return true;
    return BROKEN.includes(this.code) && this.reason === "" && !REFUSED.test(this.message);
  }
}

function detailsOf(error) {
  const found = {};
  const [encoded] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (encoded === undefined) return found;
  for (const { typeUrl, value } of details.lookupType("Status").decode(encoded).details) {
    const name = typeUrl.split(".").pop();
    if (["ErrorInfo", "BadRequest", "RetryInfo"].includes(name)) {
      found[name] = details.lookupType(name).decode(value);
    }
  }
  return found;
}

function secondsOf(delay) {
  return Number(delay?.seconds ?? 0) + (delay?.nanos ?? 0) / 1e9;
}
