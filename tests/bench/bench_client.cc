// SPDX-License-Identifier: Apache-2.0
//
// A client process of the benchmark: does what it is told, times it, and stays. gpu_bench starts several. It answers
// one line of JSON to each line of JSON:
//   {"do": "activate", "model": M, "verify": true}, "deactivate", "verify", "status"
//                  calls the daemon and gives its `response` and the `seconds` until it was there
//   {"do": "context"}                        has a CUDA context from then on, as a process that computes has
//   {"do": "attach", "model": M, "connect": B}
//                  takes a lease; `seconds` from the call to weights that can be read. With `connect` the connection to
//                  the daemon is made within that time, otherwise the one before is used where there is one
//   {"do": "detach"}                         gives it back
//   {"do": "hash", "every": E, "bytes": B}   SHA-256 of the first B bytes of every E of each tensor, as on the device
// or {"error": MESSAGE}.
//
//   bench_client RUNTIME_DIR cuda|sim DEVICE
#include <grpcpp/client_context.h>
#include <openssl/evp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/ctl/proto_json.h"
#include "client/grpc_status.h"
#include "mechanisms/device.h"
#include "mechanisms/open_driver.h"
#include "mechanisms/refusal.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::Duration kPatience = absl::Minutes(2);

class BenchClient {
 public:
  BenchClient(std::string runtime_dir, DriverKind kind, int device)
      : runtime_dir_(std::move(runtime_dir)), kind_(kind), device_index_(device) {}

  absl::StatusOr<Json> Obey(const Json& command) {
    const std::string what = command.value("do", "");
    if (what == "context") return OpenContext();
    if (what == "attach") return Attach(command.value("model", ""), command.value("connect", false));
    if (what == "detach") return Detach();
    if (what == "hash") return Hash(command.value("every", 2 * kMiB), command.value("bytes", 4 * kKiB));
    if (auto status = Connect(); !status.ok()) return status;
    auto& service = client_->service();
    if (what == "status") {
      v1::GetStatusRequest request;
      request.set_model(command.value("model", ""));
      return Call<v1::GetStatusResponse>(
          [&](auto* context, auto* response) { return service.GetStatus(context, request, response); });
    }
    if (what == "activate") {
      v1::ActivateRequest request;
      request.set_model(command.value("model", ""));
      if (!command.value("verify", true)) {
        if (auto status = SkipVerification(request); !status.ok()) return status;
      }
      return Call<v1::ActivateResponse>(
          [&](auto* context, auto* response) { return service.Activate(context, request, response); });
    }
    if (what == "deactivate") {
      v1::DeactivateRequest request;
      request.set_model(command.value("model", ""));
      return Call<v1::DeactivateResponse>(
          [&](auto* context, auto* response) { return service.Deactivate(context, request, response); });
    }
    if (what == "verify") {
      v1::VerifyRequest request;
      request.set_model(command.value("model", ""));
      return Call<v1::VerifyResponse>(
          [&](auto* context, auto* response) { return service.Verify(context, request, response); });
    }
    return absl::InvalidArgumentError(absl::StrCat("no such command: ", command.dump()));
  }

 private:
  // By name, so that this also builds, and says so, where the daemon always verifies.
  static absl::Status SkipVerification(v1::ActivateRequest& request) {
    const auto* field = request.GetDescriptor()->FindFieldByName("skip_verification");
    if (field == nullptr) return absl::UnimplementedError("this daemon cannot skip the verification");
    request.GetReflection()->SetBool(&request, field, true);
    return absl::OkStatus();
  }

  absl::Status Connect() {
    if (client_ != nullptr) return absl::OkStatus();
    auto client = Client::Connect({runtime_dir_, "bench_client", kPatience});
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    return absl::OkStatus();
  }

  template <typename Response, typename Method>
  absl::StatusOr<Json> Call(Method method) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kPatience));
    Response response;
    const absl::Time start = absl::Now();
    const grpc::Status status = method(&context, &response);
    const absl::Duration took = absl::Now() - start;
    if (!status.ok()) return FromGrpcStatus(status);
    return Json{{"seconds", absl::ToDoubleSeconds(took)}, {"response", ProtoToJson(response)}};
  }

  absl::StatusOr<Json> OpenContext() {
    auto driver = OpenDriver(kind_, SimOptions{.directory = runtime_dir_ + "/sim"});
    if (!driver.ok()) return driver.status();
    driver_ = *driver;
    if (auto count = Device::Count(driver_); !count.ok()) return count.status();
    auto device = Device::Open(driver_, device_index_);
    if (!device.ok()) return device.status();
    device_ = *std::move(device);
    if (auto status = device_->MakeCurrent(); !status.ok()) return status;
    return Json::object();
  }

  absl::StatusOr<Json> Attach(const std::string& model, bool connect) {
    lease_.reset();
    if (connect) client_.reset();
    const absl::Time start = absl::Now();
    if (auto status = Connect(); !status.ok()) return status;
    auto lease = client_->Activate(model, {.deadline = start + kPatience});
    if (!lease.ok()) return lease.status();
    lease_.emplace(*std::move(lease));
    {
      // What a program does before its first kernel.
      const auto use = lease_->Use({.deadline = start + kPatience});
      if (!use.ok()) return use.status();
    }
    return Json{{"seconds", absl::ToDoubleSeconds(absl::Now() - start)}, {"tensors", lease_->tensors().size()}};
  }

  absl::StatusOr<Json> Detach() {
    const absl::Time start = absl::Now();
    lease_.reset();
    return Json{{"seconds", absl::ToDoubleSeconds(absl::Now() - start)}};
  }

  absl::StatusOr<Json> Hash(uint64_t every, uint64_t bytes) {
    if (!lease_.has_value()) return absl::FailedPreconditionError("hash without attach");
    const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> sum(EVP_MD_CTX_new(), EVP_MD_CTX_free);
    if (sum == nullptr || EVP_DigestInit_ex(sum.get(), EVP_sha256(), nullptr) != 1) {
      return absl::InternalError("OpenSSL has no SHA-256");
    }
    const auto use = lease_->Use({.deadline = absl::Now() + kPatience});
    if (!use.ok()) return use.status();
    std::vector<uint8_t> buffer(bytes);
    for (const LeaseTensor& tensor : lease_->tensors()) {
      for (uint64_t offset = 0; offset < tensor.bytes; offset += every) {
        const uint64_t part = std::min(bytes, tensor.bytes - offset);
        if (auto status = lease_->Read(tensor, offset, {buffer.data(), part}); !status.ok()) return status;
        if (EVP_DigestUpdate(sum.get(), buffer.data(), part) != 1) return absl::InternalError("SHA-256 failed");
      }
    }
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int digest_bytes = 0;
    if (EVP_DigestFinal_ex(sum.get(), digest, &digest_bytes) != 1) return absl::InternalError("SHA-256 failed");
    return Json{{"sha256", absl::BytesToHexString({reinterpret_cast<const char*>(digest), digest_bytes})}};
  }

  const std::string runtime_dir_;
  const DriverKind kind_;
  const int device_index_;
  Driver driver_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Client> client_;
  std::optional<Lease> lease_;
};

int Main(const std::string& runtime_dir, DriverKind kind, int device) {
  BenchClient client(runtime_dir, kind, device);
  for (std::string line; std::getline(std::cin, line);) {
    const Json command = Json::parse(line, nullptr, false);
    const auto answer = command.is_object() ? client.Obey(command) : absl::InvalidArgumentError("no JSON object");
    const Json json =
        answer.ok()
            ? *answer
            : Json{{"error", absl::StrCat(absl::StatusCodeToString(answer.status().code()), "/",
                                          ReasonOf(answer.status()), ": ", std::string(answer.status().message()))}};
    std::cout << json.dump() << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  int device = 0;
  if (argc != 4 || !absl::SimpleAtoi(argv[3], &device) || !residency::ParseDriverKind(argv[2]).ok()) {
    std::fputs("usage: bench_client RUNTIME_DIR cuda|sim DEVICE\n", stderr);
    return 2;
  }
  return residency::Main(argv[1], *residency::ParseDriverKind(argv[2]), device);
}
