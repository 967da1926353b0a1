// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/dry_run_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "mechanisms/units.h"

namespace residency {
namespace {

std::string FitLine(const std::string& mode, const v1::Fit& fit) {
  std::string line = absl::StrCat("  ", mode, fit.fits() ? "fits" : "does not fit", ": ", fit.needed_bytes(),
                                  " bytes needed, ", fit.available_bytes(), " available");
  if (!fit.component().empty()) absl::StrAppend(&line, "; largest component ", fit.component());
  return absl::StrCat(line, "\n");
}

}  // namespace

std::string DryRunText(const std::string& name, const v1::DryRun& run) {
  std::string out = absl::StrCat(
      name, " was not registered; it would take ", run.set_bytes(), " bytes of host memory (",
      FormatBytes(run.set_bytes()), ")\n  host     ", run.host_fits() ? "fits" : "does not fit", ": ",
      run.host_needed_bytes(), " bytes needed, ",
      run.has_host_available_bytes() ? absl::StrCat(run.host_available_bytes()) : std::string("any number"),
      " available; ", run.pin().message(), "\non ", run.device_uuid(), "\n");
  absl::StrAppend(&out, FitLine("held     ", run.held()), FitLine("phased   ", run.phased()));
  absl::StrAppend(&out, run.has_streamed() ? FitLine("streamed ", run.streamed()) : "  streamed not offered yet\n");
  absl::StrAppend(
      &out, "advised flags: ", run.advised_flags().empty() ? "none" : absl::StrJoin(run.advised_flags(), " "), "\n");
  return out;
}

}  // namespace residency
