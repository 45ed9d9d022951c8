#include "backends/ucx/transport.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>

namespace kvxfer::ucx {

namespace {

constexpr std::size_t max_transports = 32;
constexpr std::size_t most_said = 1024;  // UCX 1.22 says up to 200 characters of a request

std::string printed(const Library& library, ucp_ep_h endpoint) {
  char* text = nullptr;
  std::size_t bytes = 0;
  std::FILE* const file = ::open_memstream(&text, &bytes);
  if (file == nullptr) return {};
  library.ucp_ep_print_info(endpoint, file);
  std::fclose(file);
  const std::unique_ptr<char, decltype(&std::free)> owner(text, std::free);
  return {text, bytes};
}

// transport/device of transport/device/path
std::string without_path(const std::string& name) {
  const std::size_t device = name.find('/'), path = name.find('/', device + 1);
  return name.substr(0, path);
}

}  // namespace

void add(std::string& all, const std::string& one, const std::string& between) {
  if ((between + all + between).find(between + one + between) != std::string::npos) return;
  if (!all.empty()) all += between;
  all += one;
}

// A line: "lane[1]:  1:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] rma_bw#0 am wireup".
std::string lanes_for(const std::string& use, const std::string& text) {
  std::string found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t lane = line.find("lane["), colon = line.find(':', lane), number = line.find(':', colon + 1);
    if (lane == std::string::npos || number == std::string::npos || line.find(" " + use) == std::string::npos) continue;
    std::string name = line.substr(number + 1, line.find(' ', number) - number - 1);
    if (const std::size_t path = name.rfind('.'); path != std::string::npos) name.resize(path);
    if (name.find('/') != std::string::npos) add(found, name);
  }
  return found;
}

// Which of an endpoint's transports puts and gets go over is told by what it prints alone; the query tells them all,
// and nothing at all before 1.14.
std::string transport_of(const Library& library, ucp_ep_h endpoint) {
  const std::string text = printed(library, endpoint);
  std::string found = lanes_for("rma", text);
  if (found.empty()) found = lanes_for("am", text);  // UCX makes puts and gets of messages there
  if (!found.empty()) return found;
#if UCP_API_VERSION >= UCP_VERSION(1, 14)
  std::array<ucp_transport_entry_t, max_transports> entries{};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports = {entries.data(), entries.size(), sizeof entries[0]};
  if (library.ucp_ep_query(endpoint, &attributes) == UCS_OK)
    for (unsigned i = 0; i < attributes.transports.num_entries; ++i)
      if (entries[i].transport_name != nullptr && entries[i].device_name != nullptr && *entries[i].device_name != '\0')
        add(found, std::string(entries[i].transport_name) + "/" + entries[i].device_name);
#endif
  return found.empty() ? "unknown" : found;
}

// Such as "{cpml|proto|init} put from host memory length 65536 zero-copy tcp/lo 11.8 MB/s 5307.05 us", or, of several,
// "... length 1048576 multi-frag zero-copy 30% on rc_mlx5/mlx5_0:1/path0 and 70% on rc_mlx5/mlx5_1:1/path0 ...".
std::optional<Protocol> read_protocol(const std::string& said) {
  std::istringstream words(said);
  std::string word;
  while (words >> word && word != "length") {
  }
  if (!(words >> word)) return std::nullopt;  // the length itself
  Protocol protocol;
  bool configured = false;
  while (words >> word && word != "MB/s") {  // from there on it is what UCX expects of it
    const bool names_transport = word.find('/') != std::string::npos;
    configured |= names_transport || word.back() == '%';
    if (names_transport)
      add(protocol.transport, without_path(word));
    else if (!configured && word != "(?)")
      protocol.how += (protocol.how.empty() ? "" : " ") + word;
  }
  if (protocol.transport.empty()) return std::nullopt;
  return protocol;
}

std::optional<Protocol> protocol_of(const Library& library, void* request) {
  std::array<char, most_said> said{};
  ucp_request_attr_t attributes{};
  attributes.field_mask = UCP_REQUEST_ATTR_FIELD_INFO_STRING | UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE;
  attributes.debug_string = said.data();
  attributes.debug_string_size = said.size();
  if (library.ucp_request_query(request, &attributes) != UCS_OK) return std::nullopt;
  said.back() = '\0';
  return read_protocol(said.data());
}

}  // namespace kvxfer::ucx
