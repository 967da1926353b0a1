// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/card_figures_text.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "mechanisms/units.h"
#include "mechanisms/version.h"

namespace residency {
namespace {

// As links are sold: in powers of 1000.
std::string RateText(double bytes_per_second) { return absl::StrFormat("%.2f GB/s", bytes_per_second / 1e9); }

std::string RateText(const Rate& rate) {
  return absl::StrFormat("%s (%.2f to %.2f, %d times)", RateText(rate.median), rate.least / 1e9, rate.most / 1e9,
                         rate.times);
}

std::string CellText(const CellFigures& cell) {
  const auto text = [](absl::Duration duration) {
    return absl::StrFormat("%.1f", absl::ToDoubleMicroseconds(duration));
  };
  return absl::StrFormat("  %9s %8s %8s %8s %8s %8s %8s %8s\n", FormatBytes(cell.bytes), text(cell.create),
                         text(cell.map), text(cell.set_access), text(cell.export_descriptor),
                         cell.import_descriptor.has_value() ? text(*cell.import_descriptor) : "-", text(cell.unmap),
                         text(cell.release));
}

std::string FiguresText(const CardFigures& figures) {
  std::string out;
  const auto line = [&out](const char* what, const std::string& found) {
    absl::StrAppendFormat(&out, "  %-12s %s\n", what, found);
  };
  line("driver", figures.driver);
  line("memory", FormatBytes(figures.device.total_bytes));
  line("PCIe", figures.pcie);
  line("kernel", figures.kernel);
  line("measured", absl::StrCat("with ", FormatBytes(figures.measured_bytes), " of host memory, ",
                                FormatBytes(figures.huge_page_bytes), " of them in huge pages"));
  line("", "in a context of its own, beside whatever else uses the card");
  line("copy", absl::StrCat(RateText(figures.copy), ", page-locked, to the GPU"));
  line("page-lock",
       absl::StrCat(RateText(figures.page_lock_bytes_per_second), " of memory that is there, faulted in at ",
                    RateText(figures.fault_in_bytes_per_second)));
  line("digest", absl::StrCat(RateText(figures.digest), ", on the GPU"));
  absl::StrAppendFormat(&out, "\n  %9s %8s %8s %8s %8s %8s %8s %8s\n", "us a cell", "create", "map", "access", "export",
                        "import", "unmap", "release");
  for (const CellFigures& cell : figures.cells) absl::StrAppend(&out, CellText(cell));
  return out;
}

nlohmann::ordered_json RateToJson(const Rate& rate) {
  return {{"median", rate.median}, {"least", rate.least}, {"most", rate.most}, {"times", rate.times}};
}

nlohmann::ordered_json CellToJson(const CellFigures& cell) {
  nlohmann::ordered_json json = {{"cell_bytes", cell.bytes}};
  const std::pair<const char*, absl::Duration> steps[] = {
      {"create", cell.create},         {"map", cell.map},
      {"set_access", cell.set_access}, {"export", cell.export_descriptor},
      {"unmap", cell.unmap},           {"release", cell.release}};
  for (const auto& [step, duration] : steps) {
    json[absl::StrCat(step, "_microseconds")] = absl::ToDoubleMicroseconds(duration);
  }
  if (cell.import_descriptor.has_value()) {
    json["import_microseconds"] = absl::ToDoubleMicroseconds(*cell.import_descriptor);
  }
  return json;
}

}  // namespace

std::string CardFiguresText(const CardFigures& figures) {
  return absl::StrCat(figures.device.uuid, "  ", figures.device.name, "\n", FiguresText(figures));
}

std::string CardReportText(const CardFigures& figures) {
  return absl::StrCat("residencyd ", kVersion, " measured a ", figures.device.name, "\n", FiguresText(figures));
}

nlohmann::ordered_json CardFiguresToJson(const CardFigures& figures, bool with_uuid) {
  nlohmann::ordered_json json = {{"version", kVersion}};
  if (with_uuid) json["uuid"] = figures.device.uuid;
  json["name"] = figures.device.name;
  json["driver"] = figures.driver;
  json["total_bytes"] = figures.device.total_bytes;
  json["pcie"] = figures.pcie;
  json["kernel"] = figures.kernel;
  json["measured_bytes"] = figures.measured_bytes;
  json["huge_page_bytes"] = figures.huge_page_bytes;
  json["copy_bytes_per_second"] = RateToJson(figures.copy);
  json["page_lock_bytes_per_second"] = figures.page_lock_bytes_per_second;
  json["fault_in_bytes_per_second"] = figures.fault_in_bytes_per_second;
  json["digest_bytes_per_second"] = RateToJson(figures.digest);
  json["cells"] = nlohmann::ordered_json::array();
  for (const CellFigures& cell : figures.cells) json["cells"].push_back(CellToJson(cell));
  return json;
}

}  // namespace residency
