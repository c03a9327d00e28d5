"""What things take, beside a peer in the same run, and what fault campaigns notice."""
