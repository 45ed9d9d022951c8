// What UCX says, in words, of the transports that it uses.
#pragma once

#include <ucp/api/ucp.h>

#include <optional>
#include <string>

#include "backends/ucx/library.h"

namespace kvxfer::ucx {

// Adds one to all that are there, unless it is among them.
void add(std::string& all, const std::string& one, const std::string& between = "+");

// Of the lines of ucp_ep_print_info(): transport and device of the lanes that have the use ("rma", "am"), each once.
std::string lanes_for(const std::string& use, const std::string& printed);

// Those of an endpoint that puts and gets may go over, before any has.
std::string transport_of(const Library& library, ucp_ep_h endpoint);

// How one put or get went: "zero-copy", over "tcp/lo".
struct Protocol {
  std::string how;
  std::string transport;
};

// Of what ucp_request_query() says; nothing where that names no transport, as with UCX 1.13.
std::optional<Protocol> read_protocol(const std::string& said);

// Of a request that ended well and is not free yet.
std::optional<Protocol> protocol_of(const Library& library, void* request);

}  // namespace kvxfer::ucx
