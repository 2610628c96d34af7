// Errors of calls, with the details sent by the service.

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protobuf from "protobufjs";

const details = protobuf.loadSync(fileURLToPath(new URL("rpc_details.proto", import.meta.url)));

/** Reasons of a server that cannot serve a text soon, while another one may. */
const SETTLED = ["DRAFT_REQUIRED", "MODEL_CHANGED", "MODEL_UNREADABLE", "PROMPT_CHANGED", "VERIFIER_LOST"];

/** Statuses of a broken connection, unless a server gave a reason or a proxy refused the call by HTTP. */
const BROKEN = ["CANCELLED", "INTERNAL", "UNKNOWN"];
const REFUSED = /HTTP status code:? 4\d\d/;

/** The error of a failed call. */
export class SpecdecError extends Error {
  /** @param {grpc.ServiceError} error from gRPC */
  constructor(error) {
    const told = detailsOf(error);
    super(error.details || grpc.status[error.code]);
    this.name = "SpecdecError";
    /** The status's name, such as "INVALID_ARGUMENT". */
    this.code = grpc.status[error.code];
    /** The server's reason, such as "OVERLOADED"; empty if it gave none. */
    this.reason = told.ErrorInfo?.reason ?? "";
    /** {field, description} of each field refused by the server. */
    this.violations = told.BadRequest?.fieldViolations ?? [];
    /** The server's retry delay in seconds, if any. */
    this.retryAfter = told.RetryInfo ? secondsOf(told.RetryInfo.retryDelay) : undefined;
  }

  /**
   * Whether the server, not the request, is at fault, so that another one may succeed. A failure without a server's
   * reason counts as a broken connection.
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
