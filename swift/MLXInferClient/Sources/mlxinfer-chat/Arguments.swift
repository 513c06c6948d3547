import MLXInferClient

/// What the command line says.
struct Arguments: Equatable {
    static let usage = """
        usage: mlxinfer-chat [options] [PROMPT]

        Talks to a running server (mlxinfer serve MODEL). With a PROMPT it answers once; without, it asks for one after the other.
        Ctrl-C stops the answer, and at the prompt the program.

          --socket PATH        the server's Unix socket (~/.mlxinfer/api.sock, or MLXINFER_SOCKET)
          --host HOST          a host instead of a socket, with --port
          --port PORT          8080
          --key KEY            the key of a server on TCP
          --model NAME         one of the server's models (its first)
          --system TEXT        instructions for the whole conversation
          --max-tokens COUNT   the most tokens of an answer
          --temperature NUMBER 0 takes the likeliest token each time
          --help               this text
        """

    /// A mistake on the command line, in one line.
    struct Mistake: Error, Equatable {
        let message: String
    }

    var socket: String?
    var host: String?
    var port: UInt16?
    var key: String?
    var model: String?
    var system: String?
    var options = SamplingOptions()
    var help = false
    var prompt: String?

    init(_ words: some Sequence<String>) throws {
        var words = words.makeIterator()
        var rest: [String] = []
        while let word = words.next() {
            guard word.hasPrefix("--") else {
                rest.append(word)
                continue
            }
            if word == "--help" {
                help = true
            } else if word == "--" {
                while let word = words.next() { rest.append(word) }
            } else {
                try take(word, words.next())
            }
        }
        if !rest.isEmpty { prompt = rest.joined(separator: " ") }
        if socket != nil, host != nil || port != nil { throw Mistake(message: "--socket and --host are two places: give one") }
        if key != nil, host == nil, port == nil { throw Mistake(message: "--key is for --host and --port") }
    }

    var endpoint: Endpoint {
        if let socket { return .unix(path: socket) }
        return host == nil && port == nil ? .default : .tcp(host: host ?? "127.0.0.1", port: port ?? 8080, apiKey: key)
    }

    private mutating func take(_ name: String, _ value: String?) throws {
        guard let value else { throw Mistake(message: "\(name): a value is missing, or there is no such option") }
        switch name {
        case "--socket": socket = value
        case "--host": host = value
        case "--port": port = try Self.number(name, value)
        case "--key": key = value
        case "--model": model = value
        case "--system": system = value
        case "--max-tokens": options.maxTokens = try Self.number(name, value)
        case "--temperature": options.temperature = try Self.number(name, value)
        default: throw Mistake(message: "\(name): no such option")
        }
    }

    private static func number<Number: LosslessStringConvertible>(_ name: String, _ value: String) throws -> Number {
        guard let number = Number(value) else { throw Mistake(message: "\(name): not a number it can be: \(value)") }
        return number
    }
}
