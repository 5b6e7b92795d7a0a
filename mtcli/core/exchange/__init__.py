"""The facts of replica exchanges: state, bytes sent and arithmetic of each method, without torch,
for `sync` and `plan`."""
