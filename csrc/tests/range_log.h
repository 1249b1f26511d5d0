// The ranges of profilers that a device was given, and whether all of them ended.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/device.h"

namespace zb::test {

class RangeLog {
 public:
  // `report` gets every finding.
  explicit RangeLog(std::function<void(const std::string&)> report) : report_(std::move(report)) {}
  ~RangeLog() {
    for (const std::string& name : pushed_) report_("the range '" + name + "' was never popped");
    for (const auto& [id, name] : started_) report_("the range '" + name + "' never ended");
  }
  RangeLog(const RangeLog&) = delete;
  RangeLog& operator=(const RangeLog&) = delete;

  void push(const char* name) {
    note(name);
    pushed_.emplace_back(name);
  }
  void pop() {
    if (pushed_.empty()) return report_("a range was popped that nobody had pushed");
    pushed_.pop_back();
  }
  RangeId start(const char* name) {
    note("begin " + std::string(name));
    started_.emplace_back(++last_id_, name);
    return last_id_;
  }
  void end(RangeId id) {
    const auto found = std::find_if(started_.begin(), started_.end(), [id](const auto& it) { return it.first == id; });
    if (found == started_.end()) return report_("a range ended that was not open");
    note("end " + found->second);
    started_.erase(found);
  }

  bool is_any_pushed() const { return !pushed_.empty(); }
  bool is_any_open() const { return is_any_pushed() || !started_.empty(); }
  // From now on names are kept, those of pushed ranges indented by depth, until they are taken.
  void keep() { is_kept_ = true; }
  std::vector<std::string> take() {
    is_kept_ = false;
    return std::exchange(names_, {});
  }

 private:
  void note(const std::string& name) {
    if (is_kept_) names_.push_back(std::string(2 * pushed_.size(), ' ') + name);
  }

  std::function<void(const std::string&)> report_;
  std::vector<std::string> pushed_;
  std::vector<std::pair<RangeId, std::string>> started_;
  RangeId last_id_ = 0;
  std::vector<std::string> names_;
  bool is_kept_ = false;
};

}  // namespace zb::test
