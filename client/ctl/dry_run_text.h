// SPDX-License-Identifier: Apache-2.0
//
// `register --dry_run` as text for people. Pure.
#ifndef RESIDENCY_CLIENT_CTL_DRY_RUN_TEXT_H_
#define RESIDENCY_CLIENT_CTL_DRY_RUN_TEXT_H_

#include <string>

#include "proto/residency.pb.h"

namespace residency {

std::string DryRunText(const std::string& name, const v1::DryRun& run);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_DRY_RUN_TEXT_H_
