// NAME [-runs=N] [-seed=S] [-max_total_time=SECONDS] [-artifact_prefix=P] [-make=FOLDER] [FOLDER or FILE]...
//
// Stands in for libFuzzer where there is none: gives the target every file, then changes of them by a seed, without
// looking at coverage. -make writes as many inputs as -runs says into a folder, made from nothing, and runs none. What
// an input breaks is written to a file before the program ends. The same seed gives the same inputs.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/target.h"

#if defined(__SANITIZE_ADDRESS__)
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
#elif defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:abort_on_error=1"; }
#endif

namespace {

using Input = std::vector<std::uint8_t>;

constexpr std::size_t longest = std::size_t{1} << 16;

std::mt19937_64 random_bits;  // NOLINT: seeded by main
const Input* running = nullptr;
std::string artifact = "crash";

std::uint64_t below(std::uint64_t n) { return random_bits() % n; }

// Only what a signal handler may call.
void keep_input(int signal) {
  if (const int fd = ::open(artifact.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644); fd >= 0 && running != nullptr) {
    [[maybe_unused]] const auto written = ::write(fd, running->data(), running->size());
    static constexpr char text[] = "\nthe input that broke it is in the file ";
    [[maybe_unused]] const auto told = ::write(2, text, sizeof text - 1);
    [[maybe_unused]] const auto named = ::write(2, artifact.c_str(), artifact.size());
    [[maybe_unused]] const auto ended = ::write(2, "\n", 1);
  }
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

Input read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<Input> read_all(const std::vector<std::string>& places) {
  std::vector<std::filesystem::path> files;
  for (const std::string& place : places) {
    if (!std::filesystem::exists(place)) throw std::runtime_error("there is no " + place);
    if (std::filesystem::is_regular_file(place)) files.emplace_back(place);
    if (std::filesystem::is_directory(place))
      for (const auto& entry : std::filesystem::directory_iterator(place)) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<Input> inputs;
  for (const auto& path : files) inputs.push_back(read(path));
  return inputs;
}

void run(const Input& input) {
  running = &input;
  try {
    LLVMFuzzerTestOneInput(input.data(), input.size());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::abort();
  }
  running = nullptr;
}

Input changed(Input input) {
  const std::size_t size = std::min(input.size(), longest);
  input.resize(longest);
  input.resize(LLVMFuzzerCustomMutator(input.data(), size, longest, static_cast<unsigned>(random_bits())));
  return input;
}

std::uint64_t number(const std::map<std::string, std::string>& options, const std::string& name, std::uint64_t other) {
  const auto found = options.find(name);
  return found == options.end() ? other : std::strtoull(found->second.c_str(), nullptr, 10);
}

int make(const std::string& folder, std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    Input input;
    for (std::uint64_t round = 0; round <= 2 * i; ++round) input = changed(std::move(input));
    char name[24];
    std::snprintf(name, sizeof name, "%02llu", static_cast<unsigned long long>(i));
    std::ofstream file(std::filesystem::path(folder) / name, std::ios::binary);
    file.write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
  }
  return 0;
}

}  // namespace

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size) {
  if (size == 0 || (size < max_size && below(4) == 0)) {
    if (size == max_size) return size;
    const std::size_t at = below(size + 1);
    std::memmove(data + at + 1, data + at, size - at);
    data[at] = static_cast<std::uint8_t>(random_bits());
    return size + 1;
  }
  const std::size_t at = below(size);
  switch (below(4)) {
    case 0:
      return at > 0 && below(8) == 0 ? at : size;
    case 1:
      std::memmove(data + at, data + at + 1, size - at - 1);
      return size - 1;
    default:
      data[at] ^= static_cast<std::uint8_t>(1 + below(255));
      return size;
  }
}

int main(int argc, char** argv) {
  std::map<std::string, std::string> options;
  std::vector<std::string> places;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::size_t equals = word.find('=');
    if (word.front() == '-' && equals != std::string::npos)
      options[word.substr(1, equals - 1)] = word.substr(equals + 1);
    else
      places.push_back(word);
  }
  const std::uint64_t runs = number(options, "runs", options.contains("max_total_time") ? UINT64_MAX : 0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(number(options, "max_total_time", 1U << 30));
  const std::uint64_t seed = number(options, "seed", 1);
  random_bits.seed(seed);
  artifact = options["artifact_prefix"] + "crash-seed-" + std::to_string(seed);
  if (options.contains("make")) return make(options["make"], runs);
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::signal(signal, keep_input);
  try {
    std::vector<Input> inputs = read_all(places);
    for (const Input& input : inputs) run(input);
    const std::size_t files = inputs.size();
    if (inputs.empty()) inputs.emplace_back();
    std::uint64_t done = 0;
    for (; done < runs && std::chrono::steady_clock::now() < end; ++done) {
      Input input = inputs[below(inputs.size())];
      for (std::uint64_t round = 0; round <= below(4); ++round) input = changed(std::move(input));
      run(input);
    }
    std::printf("%zu files and %llu changes of them (seed %llu): survived\n", files,
                static_cast<unsigned long long>(done), static_cast<unsigned long long>(seed));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
