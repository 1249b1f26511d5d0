#include "sim/sim_range_log.h"

#include <algorithm>

namespace zb::test {

RangeLog::~RangeLog() {
  for (const std::string& name : pushed_) report_("the range '" + name + "' was never popped");
  for (const auto& [id, name] : started_) report_("the range '" + name + "' never ended");
}

void RangeLog::push(const char* name) {
  note(name);
  pushed_.emplace_back(name);
}

void RangeLog::pop() {
  if (pushed_.empty()) return report_("a range was popped that nobody had pushed");
  pushed_.pop_back();
}

RangeId RangeLog::start(const char* name) {
  note("begin " + std::string(name));
  started_.emplace_back(++last_id_, name);
  return last_id_;
}

void RangeLog::end(RangeId id) {
  const auto found = std::find_if(started_.begin(), started_.end(), [id](const auto& it) { return it.first == id; });
  if (found == started_.end()) return report_("a range ended that was not open");
  note("end " + found->second);
  started_.erase(found);
}

std::vector<std::string> RangeLog::take() {
  is_kept_ = false;
  return std::exchange(names_, {});
}

void RangeLog::note(const std::string& name) {
  if (is_kept_) names_.push_back(std::string(2 * pushed_.size(), ' ') + name);
}

}  // namespace zb::test
