// The backends of this build: one row each.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "backend/backend.h"

namespace kvxfer {

using Options = std::map<std::string, std::int64_t>;

struct Probe {
  bool available = false;
  std::string why_not;  // and what to do about it; empty when available
  std::string library_path;
  std::string library_version;
  std::string transports;  // inside the backend, comma-separated
  std::string warning;     // what nobody should overlook although it can be used; empty: nothing
};

// Of a backend whose library is the kernel; whether it is available is left to say.
Probe kernel_probe(std::string transports);

// The secret both sides were given over the control channel; a data connection that does not begin with it is dropped.
inline constexpr std::size_t token_bytes = 32;
using Token = std::string;

struct BackendRow {
  const char* name;
  const char* summary;
  bool one_host;     // its two sides have to run on one host, in one network namespace
  Probe (*probe)();  // never throws
  std::unique_ptr<Context> (*open)(const Token& token, const Options& options);
  // Where a probe takes long: whether it is worth one, at once.
  bool (*present)() = nullptr;
};

std::span<const BackendRow> backends();
// Throws Error(usage) naming the known ones.
const BackendRow& find_backend(const std::string& name);

// Throws Error(usage) when options hold a name that is not in `known`, or a value outside its bounds.
struct OptionBounds {
  const char* name;
  std::int64_t low, high, otherwise;
};
std::int64_t option(const Options& options, const OptionBounds& bounds);
void refuse_unknown(const Options& options, std::span<const OptionBounds> known);

}  // namespace kvxfer
