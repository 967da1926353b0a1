// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/status_commands.h"

#include <grpcpp/client_context.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/client.h"
#include "client/ctl/proto_json.h"
#include "client/ctl/report.h"
#include "client/ctl/status_text.h"
#include "client/grpc_status.h"

namespace residency {
namespace {

constexpr char kClearScreen[] = "\x1b[H\x1b[2J";

struct StatusFlags {
  std::string name;
  bool watch = false;
};

int ShowStatus(const GlobalFlags& flags, Client& client, const StatusFlags& options) {
  v1::GetStatusRequest request;
  request.set_model(options.name);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + flags.timeout));
  v1::GetStatusResponse response;
  const auto status = FromGrpcStatus(client.service().GetStatus(&context, request, &response));
  if (!status.ok()) return ReportError(flags, status);
  return ReportDone(flags, response.status(), StatusText(response.status()));
}

void ShowChange(const GlobalFlags& flags, const v1::Status& status) {
  if (flags.json) return Print(absl::StrCat(JsonText(ProtoToJson(status), /*one_line=*/true), "\n"));
  const bool redraw = isatty(STDOUT_FILENO) == 1;
  Print(absl::StrCat(redraw ? kClearScreen : "", StatusText(status), redraw ? "" : "\n"));
}

int WatchStatus(const GlobalFlags& flags, Client& client, const StatusFlags& options) {
  v1::WatchStatusRequest request;
  request.set_model(options.name);
  grpc::ClientContext context;
  const auto stream = client.service().WatchStatus(&context, request);
  v1::WatchStatusResponse response;
  while (stream->Read(&response)) ShowChange(flags, response.status());
  const auto status = FromGrpcStatus(stream->Finish());
  return status.ok() ? kExitDone : ReportError(flags, status);
}

int Status(const GlobalFlags& flags, const StatusFlags& options) {
  auto client = Client::Connect({flags.runtime_dir, "residencyctl", flags.timeout});
  if (!client.ok()) return ReportError(flags, client.status());
  return options.watch ? WatchStatus(flags, **client, options) : ShowStatus(flags, **client, options);
}

int Tensors(const GlobalFlags& flags, const std::string& name) {
  auto client = Client::Connect({flags.runtime_dir, "residencyctl", flags.timeout});
  if (!client.ok()) return ReportError(flags, client.status());
  v1::ListTensorsRequest request;
  request.set_model(name);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + flags.timeout));
  const auto stream = (*client)->service().ListTensors(&context, request);
  v1::ListTensorsResponse table;
  v1::ListTensorsResponse piece;
  while (stream->Read(&piece)) table.MergeFrom(piece);
  if (auto status = FromGrpcStatus(stream->Finish()); !status.ok()) return ReportError(flags, status);
  return ReportDone(flags, table, TensorsText(table));
}

}  // namespace

void AddStatusCommands(CLI::App& app, const GlobalFlags& flags, Command& chosen) {
  auto options = std::make_shared<StatusFlags>();
  CLI::App& status = *AddCommand(app, "status", "Shows what is there, as measured now", "residencyctl status --watch",
                                 chosen, [&flags, options] { return Status(flags, *options); });
  status.add_option("NAME", options->name, "one model; all if not given");
  status.add_flag("--watch", options->watch, "show it again after every change");

  auto model = std::make_shared<std::string>();
  CLI::App& tensors = *AddCommand(app, "tensors", "Lists the tensors of a model", "residencyctl tensors flux", chosen,
                                  [&flags, model] { return Tensors(flags, *model); });
  tensors.add_option("NAME", *model, "name of the model")->required();
}

}  // namespace residency
