// The ranges of profilers that a device was given, and whether all of them ended.
#pragma once

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
  ~RangeLog();
  RangeLog(const RangeLog&) = delete;
  RangeLog& operator=(const RangeLog&) = delete;

  void push(const char* name);
  void pop();
  RangeId start(const char* name);
  void end(RangeId id);

  bool is_any_pushed() const { return !pushed_.empty(); }
  bool is_any_open() const { return is_any_pushed() || !started_.empty(); }
  // From now on names are kept, those of pushed ranges indented by depth, until they are taken.
  void keep() { is_kept_ = true; }
  std::vector<std::string> take();

 private:
  void note(const std::string& name);

  std::function<void(const std::string&)> report_;
  std::vector<std::string> pushed_;
  std::vector<std::pair<RangeId, std::string>> started_;
  RangeId last_id_ = 0;
  std::vector<std::string> names_;
  bool is_kept_ = false;
};

}  // namespace zb::test
