// SPDX-License-Identifier: Apache-2.0
//
// The gRPC service. It turns a request into a value, posts it to the decision loop, and turns the answer back.
// gRPC's threads own nothing: all but the posting runs on the loop.
#ifndef RESIDENCY_DAEMON_SERVICE_H_
#define RESIDENCY_DAEMON_SERVICE_H_

#include "daemon/broker.h"
#include "daemon/connections.h"
#include "daemon/loop.h"
#include "proto/residency.grpc.pb.h"

namespace residency {

class Service final : public v1::Residency::CallbackService {
 public:
  // All of them outlive the server that has the service.
  Service(Loop& loop, Broker& broker, const Connections& connections)
      : loop_(loop), broker_(broker), connections_(connections) {}

  // Ends every call that watches with Broker::ending. On the loop, after Broker::ShutDown.
  void ShutDown();

  grpc::ServerWriteReactor<v1::RegisterModelResponse>* RegisterModel(grpc::CallbackServerContext* context,
                                                                     const v1::RegisterModelRequest* request) override;
  grpc::ServerUnaryReactor* UnloadModel(grpc::CallbackServerContext* context, const v1::UnloadModelRequest* request,
                                        v1::UnloadModelResponse* response) override;
  grpc::ServerUnaryReactor* Activate(grpc::CallbackServerContext* context, const v1::ActivateRequest* request,
                                     v1::ActivateResponse* response) override;
  grpc::ServerUnaryReactor* BeginPhase(grpc::CallbackServerContext* context, const v1::BeginPhaseRequest* request,
                                       v1::BeginPhaseResponse* response) override;
  grpc::ServerUnaryReactor* EndPhase(grpc::CallbackServerContext* context, const v1::EndPhaseRequest* request,
                                     v1::EndPhaseResponse* response) override;
  grpc::ServerUnaryReactor* ReleaseLease(grpc::CallbackServerContext* context, const v1::ReleaseLeaseRequest* request,
                                         v1::ReleaseLeaseResponse* response) override;
  grpc::ServerUnaryReactor* Deactivate(grpc::CallbackServerContext* context, const v1::DeactivateRequest* request,
                                       v1::DeactivateResponse* response) override;
  grpc::ServerUnaryReactor* Verify(grpc::CallbackServerContext* context, const v1::VerifyRequest* request,
                                   v1::VerifyResponse* response) override;
  grpc::ServerUnaryReactor* Trim(grpc::CallbackServerContext* context, const v1::TrimRequest* request,
                                 v1::TrimResponse* response) override;
  grpc::ServerWriteReactor<v1::ListTensorsResponse>* ListTensors(grpc::CallbackServerContext* context,
                                                                 const v1::ListTensorsRequest* request) override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchStatusResponse>* WatchStatus(grpc::CallbackServerContext* context,
                                                                 const v1::WatchStatusRequest* request) override;

 private:
  absl::StatusOr<SessionId> FindSession(const grpc::CallbackServerContext& context, const std::string& wire_id) const;

  Loop& loop_;
  Broker& broker_;
  const Connections& connections_;
  std::map<uint64_t, std::function<void()>> watching_;  // ends one, by watcher
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_SERVICE_H_
