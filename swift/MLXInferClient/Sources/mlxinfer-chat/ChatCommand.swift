import Foundation
import MLXInferClient

@main
enum ChatCommand {
    static func main() async {
        do {
            let arguments = try Arguments(CommandLine.arguments.dropFirst())
            guard !arguments.help else { return print(Arguments.usage) }
            exit(await run(arguments))
        } catch let mistake as Arguments.Mistake {
            Terminal.note("mlxinfer-chat: \(mistake.message)\n\(Arguments.usage)")
        } catch {
            Terminal.note("mlxinfer-chat: \(error)")
        }
        exit(2)
    }

    private static func run(_ arguments: Arguments) async -> Int32 {
        let interrupts = Interrupts()
        let client = Client(arguments.endpoint, model: arguments.model)
        var conversation = Conversation(client: client, options: arguments.options, system: arguments.system)
        if let prompt = arguments.prompt {
            switch await conversation.ask(prompt, interrupts) {
            case .answered: return 0
            case .stopped: return 130
            case .failed: return 1
            }
        }
        while let prompt = nextPrompt() {
            if !prompt.isEmpty { _ = await conversation.ask(prompt, interrupts) }
        }
        return 0
    }

    private static func nextPrompt() -> String? {
        Terminal.note("> ", end: "")
        return readLine()?.trimmingCharacters(in: .whitespaces)
    }
}
