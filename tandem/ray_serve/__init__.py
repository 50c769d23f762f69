"""Where Tandem runs: Kubernetes on Trainium (`k8s/`), Ray Serve."""
