// SPDX-License-Identifier: Apache-2.0
//
// One gRPC call each, as the decision loop sees it. gRPC calls the reactor on threads of its own; these only post,
// so that everything about a call happens on the loop, in order, and the call is deleted there as the last thing.
#ifndef RESIDENCY_DAEMON_CALLS_H_
#define RESIDENCY_DAEMON_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "daemon/grpc_status.h"
#include "daemon/loop.h"

namespace residency {

// A call with one answer. Finish(ToGrpcStatus(...)) once, on the loop.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  // `start` runs on the loop.
  static UnaryCall* Start(Loop& loop, std::function<void(UnaryCall&)> start) {
    auto* call = new UnaryCall(loop);
    loop.Post([call, start = std::move(start)] { start(*call); });
    return call;
  }

  void End(const absl::Status& status) {
    ended_ = true;
    Finish(ToGrpcStatus(status));
  }
  // Runs on the loop when the caller goes away before End; at once where it has gone.
  void OnGone(std::function<void()> gone) {
    if (gone_) return gone();
    on_gone_ = std::move(gone);
  }

 private:
  explicit UnaryCall(Loop& loop) : loop_(loop) {}
  void OnCancel() override {
    loop_.Post([this] {
      gone_ = true;
      if (!ended_ && on_gone_) on_gone_();
    });
  }
  void OnDone() override {
    loop_.Post([this] { delete this; });
  }

  Loop& loop_;
  std::function<void()> on_gone_;
  bool gone_ = false;
  bool ended_ = false;
};

// A call with a stream of answers.
template <typename Response>
class StreamCall final : public grpc::ServerWriteReactor<Response> {
 public:
  static StreamCall* Start(Loop& loop, std::function<void(StreamCall&)> start) {
    auto* call = new StreamCall(loop);
    loop.Post([call, start = std::move(start)] { start(*call); });
    return call;
  }

  // How many answers wait for a slow reader.
  size_t backlog() const { return queue_.size(); }
  void Push(Response response) {
    if (end_.has_value()) return;
    queue_.push_back(std::move(response));
    Continue();
  }
  // After what was pushed.
  void End(const absl::Status& status) {
    if (end_.has_value()) return;
    end_ = status;
    Continue();
  }
  bool ended() const { return end_.has_value(); }
  void OnGone(std::function<void()> gone) {
    if (gone_) return gone();
    on_gone_ = std::move(gone);
  }
  // Runs on the loop whenever an answer has gone out.
  void OnSent(std::function<void()> sent) { on_sent_ = std::move(sent); }

 private:
  explicit StreamCall(Loop& loop) : loop_(loop) {}
  void Continue() {
    if (writing_ || finished_) return;
    if (!queue_.empty()) {
      writing_ = true;
      this->StartWrite(&queue_.front());
    } else if (end_.has_value()) {
      finished_ = true;
      this->Finish(ToGrpcStatus(*end_));
    }
  }
  void OnWriteDone(bool ok) override {
    loop_.Post([this, ok] {
      writing_ = false;
      queue_.pop_front();
      // The caller is gone, or its connection: nothing more will arrive there.
      if (!ok) queue_.clear();
      Continue();
      if (on_sent_ && !end_.has_value()) on_sent_();
    });
  }
  void OnCancel() override {
    loop_.Post([this] {
      gone_ = true;
      if (!end_.has_value() && on_gone_) on_gone_();
      End(absl::CancelledError("the caller has gone away"));
    });
  }
  void OnDone() override {
    loop_.Post([this] { delete this; });
  }

  Loop& loop_;
  std::deque<Response> queue_;
  std::optional<absl::Status> end_;
  std::function<void()> on_gone_;
  std::function<void()> on_sent_;
  bool writing_ = false;
  bool finished_ = false;
  bool gone_ = false;
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_CALLS_H_
