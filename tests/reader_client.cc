// SPDX-License-Identifier: Apache-2.0
//
// A client process that a test steers: attaches to a model, then does what each line of standard input says and
// answers with one line of JSON. Ends with the input.
//   hash   the SHA-256 of each tensor as it is on the device, and its address, read inside one use
//   use    begins a use and keeps it
//   leave  ends that use
//   elsewhere  makes the context of the last GPU current on the thread that does all this, once and for all
//   scribble  has a kernel of this process write into the weights, through its mapping of them
//   poison  makes a kernel of this process read where nothing is mapped, which costs the process its context
//
//   reader_client RUNTIME_DIR MODEL
#include <openssl/sha.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "mechanisms/device.h"
#include "mechanisms/digester.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

using Json = nlohmann::json;

constexpr absl::Duration kUseDeadline = absl::Seconds(20);

Json ErrorJson(const absl::Status& status) {
  return {{"error",
           {{"code", absl::StatusCodeToString(status.code())},
            {"reason", ReasonOf(status)},
            {"message", std::string(status.message())}}}};
}

std::string Sha256(const std::vector<uint8_t>& bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(bytes.data(), bytes.size(), digest);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

Json Hash(Lease& lease) {
  const auto use = lease.Use({.deadline = absl::Now() + kUseDeadline});
  if (!use.ok()) return ErrorJson(use.status());
  Json tensors = Json::object();
  Json addresses = Json::object();
  for (const LeaseTensor& tensor : lease.tensors()) {
    std::vector<uint8_t> bytes(tensor.bytes);
    if (auto status = lease.ReadTensor(tensor, bytes.data()); !status.ok()) return ErrorJson(status);
    const bool unique = lease.Find(tensor.name) == &tensor;
    const std::string name = unique ? tensor.name : absl::StrCat(tensor.component, "/", tensor.name);
    tensors[name] = Sha256(bytes);
    addresses[name] = tensor.address;
  }
  return {{"generation", lease.generation()}, {"sha256", tensors}, {"addresses", addresses}};
}

absl::StatusOr<Driver> OpenOwnDriver(const std::string& runtime_dir) {
  const char* name = std::getenv("RESIDENCY_TEST_DRIVER");
  const auto kind = ParseDriverKind(name == nullptr || *name == '\0' ? "sim" : name);
  if (!kind.ok()) return kind.status();
  return OpenDriver(*kind, SimOptions{.directory = runtime_dir + "/sim"});
}

// What a program that uses several GPUs does; the library has to find its own.
Json GoElsewhere(const std::string& runtime_dir) {
  static const auto driver = OpenOwnDriver(runtime_dir);
  if (!driver.ok()) return ErrorJson(driver.status());
  const auto count = Device::Count(*driver);
  if (!count.ok()) return ErrorJson(count.status());
  static const auto device = Device::Open(*driver, *count - 1);
  if (!device.ok()) return ErrorJson(device.status());
  const absl::Status current = (*device)->MakeCurrent();
  return current.ok() ? Json::object() : ErrorJson(current);
}

// Adds the digest of a word of its own to the first word of the weights. The error of the kernel.
absl::Status WriteIntoWeights(const Device& device, CUdeviceptr weights) {
  const Driver& driver = device.driver();
  CUmodule module = nullptr;
  CUfunction kernel = nullptr;
  const auto items = device.Allocate(sizeof(DigestItem));
  const auto word = device.Allocate(sizeof(uint64_t));
  const auto stream = device.CreateStream();
  if (!items.ok() || !word.ok() || !stream.ok()) return absl::InternalError("cannot prepare a kernel");
  const DigestItem item{.address = word->get(), .word_count = 1, .first_index = 0};
  for (const absl::Status& status :
       {device.Check(driver.cuModuleLoadData(&module, DigestFatbin().data()), "cuModuleLoadData"),
        device.Check(driver.cuModuleGetFunction(&kernel, module, kDigestKernel), "cuModuleGetFunction"),
        device.CopyToDevice(items->get(), &item, sizeof(item), *stream), device.Synchronize(*stream)}) {
    if (!status.ok()) return absl::InternalError(status.message());
  }
  CUdeviceptr items_address = items->get();
  uint32_t item_count = 1;
  void* parameters[] = {&items_address, &item_count, &weights};
  const CUresult launched =
      driver.cuLaunchKernel(kernel, 1, 1, 1, kDigestThreads, 1, 1, 0, stream->get(), parameters, nullptr);
  if (auto status = device.Check(launched, "cuLaunchKernel"); !status.ok()) return status;
  return device.Synchronize(*stream);
}

Json Scribble(const std::string& runtime_dir, Lease& lease) {
  const auto use = lease.Use({.deadline = absl::Now() + kUseDeadline});
  if (!use.ok()) return ErrorJson(use.status());
  const auto driver = OpenOwnDriver(runtime_dir);
  if (!driver.ok()) return ErrorJson(driver.status());
  const auto device = Device::Open(*driver, 0);
  return ErrorJson(device.ok() ? WriteIntoWeights(**device, lease.tensors().front().address) : device.status());
}

// The error of the kernel.
Json Poison(const std::string& runtime_dir) {
  const auto driver = OpenOwnDriver(runtime_dir);
  if (!driver.ok()) return ErrorJson(driver.status());
  const auto device = Device::Open(*driver, 0);
  if (!device.ok()) return ErrorJson(device.status());
  const auto range = (*device)->Reserve(uint64_t{2} << 20);
  const auto digester = Digester::Create(**device);
  if (!range.ok() || !digester.ok()) return ErrorJson(absl::InternalError("cannot poison"));
  const DigestItem item{.address = range->get(), .word_count = 1, .first_index = 0};
  return ErrorJson((*digester)->Digest({&item, 1}).status());
}

Json Obey(const std::string& command, const std::string& runtime_dir, Lease& lease, std::optional<Use>& kept) {
  if (command == "hash") return Hash(lease);
  if (command == "elsewhere") return GoElsewhere(runtime_dir);
  if (command == "scribble") return Scribble(runtime_dir, lease);
  if (command == "poison") return Poison(runtime_dir);
  if (command == "leave") {
    kept.reset();
    return Json::object();
  }
  if (command != "use") return ErrorJson(absl::InvalidArgumentError("no such command"));
  auto use = lease.Use({.deadline = absl::Now() + kUseDeadline});
  if (!use.ok()) return ErrorJson(use.status());
  kept.emplace(*std::move(use));
  return Json::object();
}

void Answer(const Json& json) { std::cout << json.dump() << std::endl; }

int Main(const std::string& runtime_dir, const std::string& model) {
  auto client = Client::Connect({runtime_dir, "reader_client", kUseDeadline});
  if (!client.ok()) {
    Answer(ErrorJson(client.status()));
    return 1;
  }
  auto lease = (*client)->Activate(model);
  if (!lease.ok()) {
    Answer(ErrorJson(lease.status()));
    return 1;
  }
  Answer({{"lease_id", lease->id()}});
  std::optional<Use> kept;
  for (std::string command; std::getline(std::cin, command);) Answer(Obey(command, runtime_dir, *lease, kept));
  return 0;
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fputs("usage: reader_client RUNTIME_DIR MODEL\n", stderr);
    return 2;
  }
  return residency::Main(argv[1], argv[2]);
}
