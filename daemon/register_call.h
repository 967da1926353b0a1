// SPDX-License-Identifier: Apache-2.0
//
// A call of RegisterModel: a registration and, where that was asked for, the activation of what was registered, which
// begins while the last bytes are being read where it can. On the decision loop.
#ifndef RESIDENCY_DAEMON_REGISTER_CALL_H_
#define RESIDENCY_DAEMON_REGISTER_CALL_H_

#include "daemon/broker.h"
#include "daemon/calls.h"
#include "daemon/events.h"
#include "proto/residency.pb.h"

namespace residency {

using RegisterCall = StreamCall<v1::RegisterModelResponse>;

// Ends `call` in any case, and gives up what it asked for when the caller goes away. `broker` outlives the call.
void StartRegister(Broker& broker, RegisterCall& call, RegisterOptions options);

// What an activation came to.
void SetActivateResponse(const ActivateOutcome& outcome, const Broker& broker, v1::ActivateResponse& response);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_REGISTER_CALL_H_
