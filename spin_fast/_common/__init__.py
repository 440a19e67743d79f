"""What every layer uses: argument checks, index arithmetic, files, progress bars."""
