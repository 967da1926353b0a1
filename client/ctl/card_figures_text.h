// SPDX-License-Identifier: Apache-2.0
//
// What `doctor --measure` found, for people, for scripts, and in the form that owners of other cards send in. Pure; any
// thread.
#ifndef RESIDENCY_CLIENT_CTL_CARD_FIGURES_TEXT_H_
#define RESIDENCY_CLIENT_CTL_CARD_FIGURES_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>

#include "client/ctl/card_figures.h"

namespace residency {

std::string CardFiguresText(const CardFigures& figures);

// The same with this program's version, and without anything that names the machine or one of its cards.
std::string CardReportText(const CardFigures& figures);

// Rates in bytes per second, durations in microseconds. `uuid` only where the figures are not for others.
nlohmann::ordered_json CardFiguresToJson(const CardFigures& figures, bool with_uuid);

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_CARD_FIGURES_TEXT_H_
