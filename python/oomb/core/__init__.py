"""The chunk loop and what it needs: attention over pages, the loss, gradient sums, pools."""
