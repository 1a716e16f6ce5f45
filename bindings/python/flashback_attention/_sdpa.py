def replace_sdpa(): pass
