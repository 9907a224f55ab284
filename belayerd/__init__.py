"""belayerd: the supervisor of worker pairs, its router and its workers."""
