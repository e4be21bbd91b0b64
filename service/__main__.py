"""`python -m service`: read the settings, check the model, serve."""

import signal
import sys


def main(arguments: list[str]) -> int:
    """Run the server; return its exit status: 0 stopped, 1 failed while running, 2 could not start as asked."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, lambda *_: sys.exit(0))  # until the server is there to end in order
    from service import logs  # only now: one that comes while these load is no traceback either

    logs.open_stderr()
    from models.config import ModelConfig
    from models.directory import resolve
    from models.errors import MLPError
    from models.weights import check
    from service import settings

    try:
        chosen = settings.load(arguments)
        logs.configure(chosen.log_format, chosen.log_requests)
        model = resolve(chosen.model)
        config = ModelConfig.load(model)
        check(model, config)
        from service.server import Server
        from service.surroundings import (
            allow_descriptors,
            bound_spinning,
            claim,
            private_directory,
            require_free,
            use_cache,
        )

        require_free(chosen.host, chosen.port)
        use_cache(chosen.cache_dir)
        bound_spinning()
        with claim(chosen.port), private_directory() as directory:
            server = Server(chosen, model, config, directory)
            allow_descriptors(chosen.max_connections, len(server.sockets))
            # its workers take seconds
            print(f"starting  {config.name} from {model}", file=logs.start_stream(), flush=True)
            return server.run()
    except MLPError as error:
        logs.tell_error(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
